"""Joins the phases for one model: from traces to the plan of every bucket."""
