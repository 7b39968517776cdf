"""Small models of many families for tests, their draft models and adapters, and an oracle that checks answers."""
