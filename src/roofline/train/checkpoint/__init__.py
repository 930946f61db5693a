"""What a run can be resumed from, and the export of a checkpoint as a model."""
