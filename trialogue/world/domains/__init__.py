"""Domains that come with the package."""
