"""Modules that several tests share; none of them holds a test."""
