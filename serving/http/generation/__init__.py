"""Sampling for HTTP: fields of requests, samplers, streams of choices, usage, log-probabilities."""
