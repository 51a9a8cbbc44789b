// Questions on llama.cpp by node-llama-cpp, prebuilt: as many requests with a cached prompt and probabilities.
//
// The state is evaluated once. Each question is evaluated behind it, and its tokens are erased again: what
// llama-server's slot does for /completion with cache_prompt and n_probs.

import {createRequire} from "node:module";
import {createInterface} from "node:readline";
import {pathToFileURL} from "node:url";
import path from "node:path";

const require = createRequire(path.join(process.cwd(), "package.json"));
const {getLlama} = await import(pathToFileURL(require.resolve("node-llama-cpp")).href);

const given = JSON.parse(process.argv[2]);
const llama = await getLlama({gpu: false, build: "never", maxThreads: given.threads});
const model = await llama.loadModel({modelPath: given.model});
const context = await model.createContext({
    contextSize: given.context, batchSize: 512, threads: given.threads
});
const sequence = context.getSequence();

async function probabilities(ids) {
    const asked = ids.slice(0, -1);
    asked.push([ids.at(-1), {generateNext: {probabilities: true, options: {temperature: 1, topK: 0, topP: 1, minP: 0}}}]);
    return (await sequence.controlledEvaluate(asked)).at(-1).next.probabilities;
}

console.log(JSON.stringify({peer: {}}));
let known = "", length = 0;
for await (const line of createInterface({input: process.stdin})) {
    const {state, questions} = JSON.parse(line);
    if (state !== known) {
        const ids = model.tokenize(state);
        await sequence.clearHistory();
        await sequence.evaluateWithoutGeneratingNewTokens(ids);
        [known, length] = [state, ids.length];
    }
    let answered = 0;
    for (const question of questions) {
        answered += (await probabilities(model.tokenize(question))).size > 0;
        await sequence.eraseContextTokenRanges([{start: length, end: sequence.nextTokenIndex}]);
    }
    console.log(JSON.stringify({peer: {answered}}));
}
process.exit(0);
