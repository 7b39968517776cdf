"""Pure builders of the Kubernetes objects that a service owns."""
