// What differs between two texts, by words (by characters where a script has no spaces).
const MOST = 1500; // pieces; beyond this the table would be slow, and the texts are shown one after the other

const pieces = (text) => text.match(/[\p{sc=Han}\p{sc=Hiragana}\p{sc=Katakana}]|[\p{L}\p{N}\p{M}'’_-]+|\s+|[^]/gu) ?? [];

/** Runs of ["same" | "removed" | "added", text] that turn `before` into `after` (longest common subsequence). */
export function differences(before, after) {
  const a = pieces(before);
  const b = pieces(after);
  let head = 0;
  while (head < a.length && head < b.length && a[head] === b[head]) head += 1;
  let tail = 0;
  while (tail < a.length - head && tail < b.length - head && a[a.length - 1 - tail] === b[b.length - 1 - tail]) tail += 1;
  const runs = [];
  const add = (kind, text) => {
    if (text === "") return;
    if (runs.at(-1)?.[0] === kind) runs.at(-1)[1] += text;
    else runs.push([kind, text]);
  };
  add("same", a.slice(0, head).join(""));
  middle(a.slice(head, a.length - tail), b.slice(head, b.length - tail), add);
  add("same", a.slice(a.length - tail).join(""));
  return runs;
}

function middle(a, b, add) {
  if (a.length > MOST || b.length > MOST) {
    add("removed", a.join(""));
    add("added", b.join(""));
    return;
  }
  const width = b.length + 1;
  const common = new Uint16Array((a.length + 1) * width); // length of the longest common subsequence of a[i:], b[j:]
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) {
      common[i * width + j] = a[i] === b[j] ? common[(i + 1) * width + j + 1] + 1 : Math.max(common[(i + 1) * width + j], common[i * width + j + 1]);
    }
  }
  let [i, j] = [0, 0];
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) { add("same", a[i]); i += 1; j += 1; }
    else if (j >= b.length || (i < a.length && common[(i + 1) * width + j] >= common[i * width + j + 1])) { add("removed", a[i]); i += 1; }
    else { add("added", b[j]); j += 1; }
  }
}
