"""The store projected into MLflow by a process of its own.

tracker        the driver's side
process        the tracking process
channel        messages between the two
projection     runs, metrics and artifacts
mlflow_record  names, params, tags and tables
description    the parent run's page
location       which MLflow store
archive        rows kept in MLflow, read back
restore        a lost store read back from MLflow
"""
