"""The suites: the settings of each table, and the published figures."""
