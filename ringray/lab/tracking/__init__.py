"""The store projected into MLflow by a process of its own.

tracker        the driver's side
worker         a process that imports MLflow, and the connection to it
process        the process that follows the store
sink           what it writes to
mlflow_sink    MLflow: runs, metrics and artifacts
mlflow_record  params, tags, tables and the parent run's description
location       which MLflow store, and its client
archive        the artifact from which a lost store is rebuilt
restore        a lost store read back from MLflow
"""
