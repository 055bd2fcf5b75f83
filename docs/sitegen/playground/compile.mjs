// Compile a folder of Python modules with the Python that a browser will run.
//     node compile.mjs PYODIDE.MJS SOURCES COMPILED < QUESTIONS
// SOURCES has library/ and packages/. Each module goes, compiled, to the same place under COMPILED; what is no
// module is copied. COMPILED/loaded.json then names the modules that were imported to answer QUESTIONS.
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [pyodide, sources, compiled] = process.argv.slice(2);
const { loadPyodide } = await import(pathToFileURL(pyodide).href);
const python = await loadPyodide();
python.mountNodeFS("/sources", sources);
python.mountNodeFS("/compiled", compiled);
python.globals.set("QUESTIONS", readFileSync(0, "utf-8"));
try {
  python.runPython(`
import json, os, py_compile, shutil, sys

for folder, _, names in os.walk("/sources"):
    into = "/compiled" + folder.removeprefix("/sources")
    os.makedirs(into, exist_ok=True)
    for name in names:
        source = f"{folder}/{name}"
        if not name.endswith(".py"):
            shutil.copyfile(source, f"{into}/{name}")
            continue
        inside = source.split("/", 3)[3]
        py_compile.compile(
            source,
            cfile=f"{into}/{name}c",
            dfile=inside,
            doraise=True,
            # Of attnsel docstrings stay: rules are told from them. Others are read by nobody.
            optimize=0 if inside.startswith("attnsel/") else 2,
            invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
        )

shutil.copytree("/compiled/packages", "/packages")
sys.path.insert(0, "/packages")
import answer

for question in QUESTIONS.split("\\n"):
    for form in answer.FORMS:
        answer.ask(question, form)
with open("/compiled/loaded.json", "w") as file:
    json.dump(sorted(sys.modules), file)
`);
} catch (error) {
  console.error(error.message); // without Pyodide's own source, which Node would print
  process.exit(1);
}
