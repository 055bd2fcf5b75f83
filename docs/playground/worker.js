// Python in a thread of its own: typing never waits for it. Every file comes from beside this one.
//     in   {start, edition, lock, first}: names and bytes of the files; {id, query, form}: a question
//     out  {bytes}: so many have arrived; {step}: what is begun; {ready}; {failed}: why not; {id, answer}; {id, failed}

const PYTHON = new URL("python/", import.meta.url);

let edition = "";
let ask = null;
let python = null;
let restLoaded = false;

/** A stored file, unpacked as it arrives: the wasm is compiled while the rest of it is under way. */
async function unpacked(name, type = "application/octet-stream") {
  const address = new URL(`${name}.gzip?v=${edition}`, PYTHON);
  let response;
  try {
    response = await ownFetch(address);
  } catch {
    throw new Error(`${address.pathname} cannot be reached`);
  }
  if (!response.ok) throw new Error(`${address.pathname} is not there (HTTP ${response.status})`);
  const counted = new TransformStream({
    transform(chunk, out) {
      postMessage({ bytes: chunk.length });
      out.enqueue(chunk);
    },
  });
  const body = response.body.pipeThrough(counted).pipeThrough(new DecompressionStream("gzip"));
  return new Response(body, { headers: { "content-type": type } });
}

const ownFetch = globalThis.fetch.bind(globalThis);

async function start(files, lock, first) {
  const wasm = unpacked("pyodide.asm.wasm", "application/wasm");
  const library = unpacked("library.zip").then((response) => response.arrayBuffer());
  const packages = unpacked("packages.zip").then((response) => response.arrayBuffer());
  for (const part of [wasm, library, packages]) part.catch(() => {}); // told once, where it is awaited
  // Pyodide asks for two files by name: it gets the streams that are under way already.
  globalThis.fetch = async (address, ...more) => {
    const name = new URL(address.url ?? address, PYTHON).pathname.split("/").at(-1);
    if (name === "pyodide.asm.wasm") return wasm;
    if (name === "library.zip") return new Response(await library);
    return ownFetch(address, ...more);
  };
  await Promise.all([wasm, library]); // a file that is missing is told by its name, not by what fails for want of it
  const { loadPyodide } = await import(`${PYTHON}pyodide.mjs`);
  for (const name of ["pyodide.mjs", "pyodide.asm.mjs"]) postMessage({ bytes: files[name] });
  postMessage({ step: "starting" });
  python = await loadPyodide({
    indexURL: PYTHON.href,
    stdLibURL: new URL("library.zip", PYTHON).href,
    lockFileContents: lock,
    packageBaseUrl: PYTHON.href,
    stdin: () => null,
    stdout: () => {},
    stderr: () => {},
    env: { HOME: "/home/pyodide", COLUMNS: "80" },
  });
  globalThis.fetch = ownFetch;
  python.unpackArchive(await packages, "zip", { extractDir: "/packages" });
  postMessage({ step: "rules" });
  ask = python.runPython(`import sys; sys.path.append("/packages"); import answer; answer.ask`);
  // The first answer imports the planner and reads its tables, which takes longer than a hundred others.
  ask(first, "markdown");
}

/** The modules that no answer was seen to need: fetched once, when one of them is missed. */
async function loadRest() {
  restLoaded = true;
  const rest = await (await unpacked("rest.zip")).arrayBuffer();
  python.unpackArchive(rest, "zip", { extractDir: "/rest" });
  python.runPython(`
import importlib, os, shutil, sys
shutil.copytree("/rest/packages", "/packages", dirs_exist_ok=True)
sys.path.append("/rest/library")
for name, module in list(sys.modules.items()):
    inside = "/rest/library/" + name.replace(".", "/")
    if hasattr(module, "__path__") and os.path.isdir(inside):
        module.__path__.append(inside)
importlib.invalidate_caches()
`);
}

async function answered(query, form) {
  if (ask === null) throw new Error("Python did not start");
  try {
    return JSON.parse(ask(query, form));
  } catch (error) {
    if (restLoaded || !/^ModuleNotFoundError|ModuleNotFoundError: /m.test(error.message)) throw error;
    await loadRest();
    return JSON.parse(ask(query, form));
  }
}

let turn = Promise.resolve();

globalThis.onmessage = ({ data }) => {
  turn = turn.then(async () => {
    if (data.start) {
      edition = data.edition;
      try {
        await start(data.start, data.lock, data.first);
        postMessage({ ready: true });
      } catch (error) {
        postMessage({ failed: error.message.trim().split("\n").at(-1) });
      }
      return;
    }
    try {
      postMessage({ id: data.id, answer: await answered(data.query, data.form) });
    } catch (error) {
      postMessage({ id: data.id, failed: error.message.trim().split("\n").at(-1) });
    }
  });
};
