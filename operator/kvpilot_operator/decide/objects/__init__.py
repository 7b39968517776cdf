"""The objects: which Deployments, Services, routes, pools and claims a service needs now."""
