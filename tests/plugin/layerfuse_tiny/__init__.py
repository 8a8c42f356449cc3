"""A package that brings one model; its `models.toml` is found beside this file."""
