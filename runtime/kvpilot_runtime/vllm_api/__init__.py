"""What we stand on in vLLM: its versions, the contract that is looked at when it starts, and where it calls us."""
