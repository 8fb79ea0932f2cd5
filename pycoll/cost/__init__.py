"""The cost model: profiles of algorithms, selection, tuning files and forecasts."""
