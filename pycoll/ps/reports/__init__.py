"""Texts of a store for its user: the errors of requests, and figures."""
