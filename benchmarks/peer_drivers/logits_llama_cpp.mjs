// Logits of llama.cpp over given tokens, computed `chunk` at a time: (tokens, vocabulary) float32 numbers.

import {createRequire} from "node:module";
import {openSync, writeSync, closeSync} from "node:fs";
import {pathToFileURL} from "node:url";
import path from "node:path";

const require = createRequire(path.join(process.cwd(), "package.json"));
const {getLlama} = await import(pathToFileURL(require.resolve("node-llama-cpp")).href);

const given = JSON.parse(process.argv[2]);
const llama = await getLlama({gpu: false, build: "never", maxThreads: given.threads});
const model = await llama.loadModel({modelPath: given.model});
const context = await model.createContext({
    contextSize: given.ids.length + 8, batchSize: given.chunk, threads: given.threads
});
const sequence = context.getSequence();
const file = openSync(given.out, "w");
for (let start = 0; start < given.ids.length; start += given.chunk) {
    const asked = given.ids.slice(start, start + given.chunk).map((token) => (
        [token, {generateNext: {logits: true, options: {temperature: 1, topK: 0, topP: 1, minP: 0}}}]
    ));
    for (const {next} of await sequence.controlledEvaluate(asked)) {
        const row = new Float32Array(given.vocabulary).fill(-Infinity);
        for (const [token, logit] of next.logits) row[token] = logit;
        writeSync(file, new Uint8Array(row.buffer));
    }
}
closeSync(file);
process.exit(0);
