"""The steps that could be taken: their gains, their costs, and the choice between them."""
