"""The objects of a service: Deployments, Services, routes, pools and claims."""
