"""Arrays of all frameworks: access to their memory, and results of the caller's type.

`registry` lists the arrays that operations take; each framework has its own module.
"""
