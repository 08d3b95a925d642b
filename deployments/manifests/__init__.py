"""From a configuration to Kubernetes manifests, as pure functions: no cluster, no Ray, no clock."""
