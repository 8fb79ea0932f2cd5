"""The invariants of stores, checked at run time where a setting asks for it."""
