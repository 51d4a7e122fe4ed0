"""Pictures of runs, drawn from a run's metrics or from given frames."""
