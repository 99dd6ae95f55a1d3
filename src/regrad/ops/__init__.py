"""The op sheets, one file per family. Importing a family registers its op types."""
