"""The interface of Horovod: its world, operations by name, and their negotiation."""
