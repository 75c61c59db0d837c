"""What any room may use: checks of arguments, pytrees, names, averages, modules imported when they are first used."""
