// Saved sequences of llama.cpp by node-llama-cpp, prebuilt: a prompt computed, saved to a file, and loaded by a
// new context. Reads {folder, model, threads, context, prompts, output, files} as its argument; prints a JSON
// line for each prompt: seconds to the first token computed and loaded, seconds to save, bytes, equal tokens.
import {createRequire} from "node:module";
import {pathToFileURL} from "node:url";

const given = JSON.parse(process.argv[2]);
const require = createRequire(given.folder + "/");
const {getLlama} = await import(pathToFileURL(require.resolve("node-llama-cpp")).href);

const llama = await getLlama({gpu: false, build: "never", maxThreads: given.threads, logLevel: "error"});
const model = await llama.loadModel({modelPath: given.model});

async function open() {
    const context = await model.createContext({
        sequences: 1, contextSize: given.context, batchSize: 512, threads: given.threads, flashAttention: "auto",
    });
    return [context, context.getSequence()];
}

async function generate(sequence, tokens) {
    const began = performance.now();
    const found = [];
    let first = 0;
    for await (const token of sequence.evaluate(tokens, {temperature: 0, yieldEogToken: true})) {
        first ||= (performance.now() - began) / 1000;
        found.push(token);
        if (found.length === given.output)
            break;
    }
    return [first, found];
}

for (const [index, prompt] of given.prompts.entries()) {
    const path = `${given.files}/${index}.seq`;
    let [context, sequence] = await open();
    const all = prompt.slice(0, -1); // the last token is evaluated after loading too
    let began = performance.now();
    await sequence.evaluateWithoutGeneratingNewTokens(all);
    let seconds = (performance.now() - began) / 1000;
    began = performance.now();
    const {fileSize} = await sequence.saveStateToFile(path);
    const save = (performance.now() - began) / 1000;
    const [last, tokens] = await generate(sequence, prompt.slice(-1));
    await context.dispose();

    [context, sequence] = await open();
    began = performance.now();
    await sequence.loadStateFromFile(path, {acceptRisk: true});
    const load = (performance.now() - began) / 1000;
    const [next, again] = await generate(sequence, prompt.slice(-1));
    await context.dispose();
    const same = again.join() === tokens.join();
    console.log(JSON.stringify({tokens: prompt.length, computed: seconds + last, loaded: load + next, save, bytes: fileSize, same}));
}
process.exit(0);
