"""Every Prometheus instrument, with the PromQL it is for in the comment above it. Label sets are bounded.

A process has one registry, made by its entry point and passed in; nothing here is global. Metrics observe: nothing
below this layer imports them. `rate` and the quantile of a histogram are meant over 5m where not said:
p95(x) = histogram_quantile(0.95, sum by (le) (rate(x_bucket[5m]))).
"""
