"""The pipeline: one module a stage, each pure up to the publishing of the result."""
