"""What binds a service, what could be done about it, and what is best: no trial, no object."""
