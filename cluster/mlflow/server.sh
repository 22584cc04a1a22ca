#!/bin/sh
# Starts MLflow's server with the secrets of a folder, one file each; no secret stands on a command line.
# Clients need MLflow's user and password alone: the server reads and writes the artifacts for them.
set -eu
secrets=${SECRETS:-/run/secrets}
here=$(dirname "$0")
PGPASSWORD=$(cat "$secrets/postgres")
MLFLOW_AUTH_ADMIN_PASSWORD=$(cat "$secrets/admin")
MLFLOW_FLASK_SERVER_SECRET_KEY=$(cat "$secrets/session")
export PGPASSWORD MLFLOW_AUTH_ADMIN_PASSWORD MLFLOW_FLASK_SERVER_SECRET_KEY
export MLFLOW_AUTH_CONFIG_PATH="${AUTH_CONFIG:-$here/auth.ini}"
# No telemetry, and no processes for jobs of MLflow's own, which sweeps do not have.
export MLFLOW_DISABLE_TELEMETRY=true MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false
if [ -s "$secrets/s3" ]; then # in AWS's format of credentials; a role of the machine needs none
  export AWS_SHARED_CREDENTIALS_FILE="$secrets/s3"
fi
exec python -m mlflow server --host "${BIND:-0.0.0.0}" --port "${PORT:-5000}" --app-name basic-auth \
  --backend-store-uri "${DATABASE:-postgresql+psycopg://mlflow@postgres/mlflow}" \
  --workers "${WORKERS:-4}" --serve-artifacts --artifacts-destination "${ARTIFACTS:-/artifacts}" \
  --allowed-hosts "${HOSTS:-127.0.0.1:5000,localhost:5000}"
