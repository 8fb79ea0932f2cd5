"""Plans: the row builder, lowering, the plan format, plans as text, and the plan verifier."""
