// llama.cpp by node-llama-cpp, prebuilt: one context with a sequence for each request, batched by its library.

import {createRequire} from "node:module";
import {createInterface} from "node:readline";
import {pathToFileURL} from "node:url";
import path from "node:path";

const require = createRequire(path.join(process.cwd(), "package.json"));
const {getLlama} = await import(pathToFileURL(require.resolve("node-llama-cpp")).href);

const given = JSON.parse(process.argv[2]);
const llama = await getLlama({gpu: false, build: "never", maxThreads: given.threads});
const model = await llama.loadModel({modelPath: given.model});
const contexts = new Map();

// A context's memory is for its number of sequences times its size: one for each shape of workload.
async function contextFor(sequences, tokens) {
    const key = `${sequences} ${tokens}`;
    if (!contexts.has(key)) {
        for (const other of contexts.values()) await other.dispose();
        contexts.clear();
        const batchSize = Math.min(512, sequences * tokens);
        contexts.set(key, await model.createContext({
            sequences, contextSize: tokens, batchSize, threads: given.threads
        }));
    }
    return contexts.get(key);
}

async function generate(sequence, prompt, output) {
    let count = 0;
    for await (const token of sequence.evaluate(prompt, {temperature: 0, yieldEogToken: true})) {
        if (++count === output) break;
    }
    return count;
}

console.log(JSON.stringify({peer: {}}));
for await (const line of createInterface({input: process.stdin})) {
    const {prompts, output} = JSON.parse(line);
    const context = await contextFor(prompts.length, Math.max(...prompts.map((ids) => ids.length)) + output + 8);
    const sequences = prompts.map(() => context.getSequence());
    const outputs = await Promise.all(prompts.map((prompt, place) => generate(sequences[place], prompt, output)));
    for (const sequence of sequences) sequence.dispose();
    console.log(JSON.stringify({peer: {outputs}}));
}
process.exit(0);
