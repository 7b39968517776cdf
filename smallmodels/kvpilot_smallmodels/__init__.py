"""Small models of many families, their drafts and adapters, and an oracle of their answers."""
