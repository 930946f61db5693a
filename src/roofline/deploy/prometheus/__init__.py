"""Files for Prometheus and Grafana: what to scrape, recording rules, alerts, a dashboard."""
