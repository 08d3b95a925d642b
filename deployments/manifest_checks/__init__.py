"""Named checks of rendered manifests, none of which needs a cluster.

What they cannot see: admission, scheduling, image pulls, and what an operator does at reconcile time beyond the rules
that are written down here.
"""
