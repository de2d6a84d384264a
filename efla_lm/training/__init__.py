"""Training parts. Import the module that is needed; this package imports nothing by itself."""
