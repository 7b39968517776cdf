"""Small models of many families, with draft models and adapters, and an oracle that checks answers in tests."""
