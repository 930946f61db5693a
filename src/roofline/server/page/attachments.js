// Files that go with a message: UTF-8 text of bounded size.

export const MOST_FILES = 10;
export const MOST_BYTES = 256 * 1024; // of a file
const KILOBYTE = 1024;

/** {attachments: [{name, text}], problems: [sentence]} of the files that were chosen beside those there are. */
export async function readFiles(files, present) {
  const attachments = [];
  const problems = [];
  for (const file of files) {
    if (present.length + attachments.length >= MOST_FILES) {
      problems.push(`A message takes at most ${MOST_FILES} files; ${file.name} was left out.`);
      continue;
    }
    try {
      attachments.push({ name: nameOf(file), text: await readText(file) });
    } catch (error) {
      problems.push(`${nameOf(file)}: ${error.message}`);
    }
  }
  return { attachments, problems };
}

// In a message the name stands on a line of its own.
// eslint-disable-next-line no-control-regex
const nameOf = (file) => (file.name || "pasted").replace(/[\x00-\x1f\x7f]/g, "").slice(0, 120) || "file";

async function readText(file) {
  if (file.size > MOST_BYTES) {
    const kilobytes = Math.ceil(file.size / KILOBYTE).toLocaleString("en");
    throw new Error(`the file has ${kilobytes} KB, and a message takes files of up to ${MOST_BYTES / KILOBYTE} KB.`);
  }
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch (error) {
    if (error instanceof TypeError) throw new Error("this is not a text file in UTF-8.");
    throw new Error("the browser could not read the file.");
  }
  if (text.includes("\0")) throw new Error("this is not a text file: it has zero bytes.");
  if (!text) throw new Error("the file is empty.");
  return text;
}
