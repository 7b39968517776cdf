"""Small models of many families for tests, with draft models and adapters, and an oracle of their answers."""
