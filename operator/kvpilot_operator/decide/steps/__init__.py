"""The steps: what could be done about the load, what each gains and costs, and which one is best."""
