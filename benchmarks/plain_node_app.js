// The peer of `python -m benchmarks synth`: the same resources as typed L1 constructs, without Python.
const path = require("node:path");
const { App, DefaultStackSynthesizer, Stack } = require("aws-cdk-lib");
const { CfnInclude } = require("aws-cdk-lib/cloudformation-include");

const app = new App();
for (const name of ["DatasetStack", "TrainingStack"]) {
  // The included templates bring their own rule of the bootstrap version.
  const synthesizer = new DefaultStackSynthesizer({ generateBootstrapVersionRule: false });
  const stack = new Stack(app, name, { synthesizer });
  new CfnInclude(stack, "Included", {
    templateFile: path.join(process.env.TEMPLATES, `${name}.template.json`),
  });
}
app.synth();
