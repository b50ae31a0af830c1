"""schemathesis: a thousand bodies by `/openapi.json`; no 5xx, every answer as documented."""

import re
import subprocess

from clients.served import command, told

CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance"),
    *("response_headers_conformance", "response_schema_conformance", "unsupported_method"),
    *("negative_data_rejection", "missing_required_header", "allow_header_conformance"),
)

if __name__ == "__main__":
    words = ["--checks", ",".join(CHECKS), "--max-examples", "50", "--seed", "1"]
    words += ["--continue-on-failure"]
    run = [command("st"), "run", *words, f"{told().address}/openapi.json"]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    (count,) = re.findall(r"(\d+) generated", done.stdout)
    assert int(count) > 1000
