"""What a person or a Prometheus looks at: metric catalogue, collector, HTTP, generated Grafana files, pictures."""
