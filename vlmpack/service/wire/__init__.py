"""Requests and results, and their JSON and protobuf formats; numpy, never torch."""
