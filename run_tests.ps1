# Install what is missing into .venv, then lint and test there, in 14 to 20 minutes on two cores.
# Arguments go to run_tests.py.
$python = if ($env:EAGLE_TRITON_PYTHON) { $env:EAGLE_TRITON_PYTHON } else { "python" }
Push-Location $PSScriptRoot
try {
    & $python setup_env.py --run run_tests.py @args
    $code = $LASTEXITCODE
} finally {
    Pop-Location
}
exit $code
