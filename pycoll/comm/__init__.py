"""The communicator, its operations on host arrays, and the world."""
