"""Makes the cluster match a Decision: the writing edges."""
