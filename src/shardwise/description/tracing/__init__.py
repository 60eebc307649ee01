"""Running a module on the meta device, to write down what it computes and keeps."""
