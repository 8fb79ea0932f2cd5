"""The schedule language, topologies, the contribution algebra and the schedule proof."""
