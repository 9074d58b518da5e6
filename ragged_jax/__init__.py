"""Fully sharded training for JAX that cuts a tensor only where its structure allows."""
