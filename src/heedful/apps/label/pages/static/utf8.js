// Bytes as text, or the position of the first byte that is not UTF-8: a replacement character would falsify the record.

/** `text`, or null and a `fault` with the `byte` (from 1) and the `line` where the text stops being UTF-8. */
export function decoded(bytes) {
  try {
    return { text: new TextDecoder("utf-8", { fatal: true }).decode(bytes), fault: null };
  } catch {
    const before = beginning(bytes);
    return { text: null, fault: { byte: new TextEncoder().encode(before).length + 1, line: before.split("\n").length } };
  }
}

/** The text before the first fault: the longest prefix in UTF-8, without a last character that is cut off. */
function beginning(bytes) {
  const read = (count) => {
    try {
      return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes.subarray(0, count), { stream: true });
    } catch {
      return null;
    }
  };
  let [low, high] = [0, bytes.length];
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (read(middle) === null) high = middle - 1;
    else low = middle;
  }
  return read(low);
}
