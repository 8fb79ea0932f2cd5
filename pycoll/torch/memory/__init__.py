"""The features that rely on internals of torch: shared storages, deferred steps, compiled code."""
