"""The parts of DistributedOptimizer: its classes, and the reduction of gradients."""
